"""Steps chunks where their state is: on the device, in pieces that come there, on the host, or as a disk is read."""
