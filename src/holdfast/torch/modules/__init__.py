"""`load_into`: a module, or a state, filled from any checkpoint without a second copy.

load_into        the call and its report
targets          the places that a checkpoint fills
match            does the checkpoint fit? everything that speaks against it
own_loaders      submodules that load themselves
"""
