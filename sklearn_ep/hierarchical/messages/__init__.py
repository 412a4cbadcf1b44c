"""Messages along rows: every factor large, a million rows in seconds."""
