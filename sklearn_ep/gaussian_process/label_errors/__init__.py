"""Labels that may be wrong: step likelihood, relaxed matching, and what follows where it fails."""
