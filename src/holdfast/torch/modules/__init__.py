"""`load_into`: a module, or a state, filled from any checkpoint without a second copy.

load_into        the call and its report; submodules that load themselves
match            names, ties, shapes and dtypes of a checkpoint against places to fill, here and on ranks
wrappers         the names of a model inside of DistributedDataParallel or torch.compile
fit              the places that a checkpoint fills, and everything that does not fit
"""
