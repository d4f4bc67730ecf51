"""Who owns which sandbox, and what they may do with it."""
