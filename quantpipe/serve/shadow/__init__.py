"""The second arm as the first one's shadow: it answers the same requests, is compared, and is heard by nobody."""
