"""What people look at: rows and characters, samples, and what a built set covers."""
