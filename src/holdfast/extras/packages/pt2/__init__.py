"""`.pt2` archives: exported programs and compiled models of torch, and the weights that belong to them.

    archive     which zip is one                                     nothing else is imported for a `.pt`
    read        the whole archive as a tree of lazy tensors
    schema      the JSON that says which weight is which view of which record
    program     what a program takes, gives and does, in a few lines
    write       the way back: packages of weights and programs, each storage once
    replace     other weights in an archive that is there; records that go into another archive as they are

Nothing here runs or imports what an archive asks for.
"""
