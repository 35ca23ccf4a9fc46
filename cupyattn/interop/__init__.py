"""Other frameworks' arrays and models; nothing is imported until it is asked for."""
