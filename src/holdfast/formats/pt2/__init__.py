"""`.pt2` archives: exported programs and compiled models of torch, and the weights that belong to them.

    archive.py    which zip is one                                     nothing else is imported for a `.pt`
    describe.py   the whole archive as a tree of lazy tensors
    config.py     the JSON that says which weight is which view of which record
    payloads.py   `torch.save` files and pickles inside of records
    program.py    what a program takes, gives and does, in a few lines
    lay_out.py    the way back: packages of weights and programs, each storage once
    copied.py     records that go into another archive as they are
    replace.py    other weights in an archive that is there

Nothing here runs or imports what an archive asks for.
"""
