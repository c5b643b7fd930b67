"""What goes wrong: full disks, forbidden places, sources that change, odd and huge states."""
