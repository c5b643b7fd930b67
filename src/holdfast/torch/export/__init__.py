"""Exported programs and weights that several models share.

packaging        `package_program`: `.pt2` archives that stock torch loads
shared_weights   which weights of several models belong together
"""
