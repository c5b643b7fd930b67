"""numpy's array files: one array (`.npy`), or a zip of them (`.npz`). No pickle is read, so arrays of objects stay closed.

archive      how both are recognised
read         one file, and an archive of them, stored or compressed
schema       the header: from bytes to a dtype, an order and a shape
"""
