"""Running Python that a model wrote: without network, other processes, other files or anything it could wait for."""
