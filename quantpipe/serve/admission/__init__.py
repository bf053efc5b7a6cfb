"""Who gets in: how much may be open at a time, how large a request may be, how slow its client. Knows no text."""
