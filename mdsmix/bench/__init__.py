"""`mdsmix bench`: measures how fast a loader is on this machine, and chooses its settings."""
