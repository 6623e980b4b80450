"""The ranks as one: who each is, how they meet, and what they say to each other."""
