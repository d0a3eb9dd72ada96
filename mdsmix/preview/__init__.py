"""A mix and its loader's own rules -> what the first steps of a run hold, before the run."""
