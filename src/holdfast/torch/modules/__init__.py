"""`load_into`: a module, or a state, filled from any checkpoint without a second copy.

load_into        the call and its report
targets          the places that a checkpoint fills
match            names, ties, shapes and dtypes of a checkpoint against places to fill, here and on ranks
fit              does the checkpoint fit this module? everything that speaks against it
own_loaders      submodules that load themselves
"""
