"""A stand-in for torchvision, so that examples on MNIST run where neither its data nor a CPU build can be had: noise for digits."""

__version__ = "0.28.0"
