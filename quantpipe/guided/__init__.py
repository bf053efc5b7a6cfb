"""Guided decoding: grammars compiled into masks over the vocabulary. Knows no engine but its protocol, and no HTTP."""
