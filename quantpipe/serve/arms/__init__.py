"""One or two models behind one port, the arms: what each is called, and which of them answers a request."""
