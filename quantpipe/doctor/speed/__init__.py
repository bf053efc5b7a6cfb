"""How fast kernels, steps and whole engines are on a GPU, beside what it could do at most."""
