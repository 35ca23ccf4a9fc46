"""Times, energy and errors of the rungs on a device, and records of them."""
