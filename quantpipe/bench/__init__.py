"""How fast what is served is: reproducible workloads, and candidate against baseline on the same machine."""
