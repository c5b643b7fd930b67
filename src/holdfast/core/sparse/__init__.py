"""Dense elements as a mark of which are there, and those: bitmaps, N:M and blocks.

    encoding    what an encoding offers, and the three: a bit an element, positions in groups of m, a bit a block of a matrix
    elements    elements as bits: what is zero, taking and placing
    storage     a storage that is kept in such parts

Nothing here reads or writes; elements are worked on as patterns of bits.
"""
