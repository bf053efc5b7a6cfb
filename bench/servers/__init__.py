"""Servers of the OpenAI API side by side: started, asked, and measured from outside."""
