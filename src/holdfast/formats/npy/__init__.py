r"""The array files of numpy: `.npy`, one array, and `.npz`, a zip archive of them.

An array file has a header in front of its elements:

    offset  size    field
    0       6       magic            \x93NUMPY
    6       2       version          1.0, 2.0 or 3.0
    8       2 or 4  header length    u16 for version 1.0, otherwise u32, little-endian
    10, 12          header           a Python dict as text, padded with spaces
                    elements         in C order or in Fortran order

`numpy.save` and `numpy.savez` write both files. `numpy.savez_compressed` deflates the members of the
archive. Other writers exist in many languages, and they differ in the spaces of the header.

numpy evaluates the header as a Python literal. This reader accepts only the few forms that writers
produce. It reads no pickle, so arrays of objects are listed and not opened.

Modules:
    detect: recognizes an archive of arrays.
    header: parses the header of an array file.
    members: decompresses the members of an archive.
    read: describes both files as checkpoints.
"""
