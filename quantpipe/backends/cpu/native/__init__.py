"""The C++ kernels of the CPU backend and what drives them: a whole step of the model is one call."""
