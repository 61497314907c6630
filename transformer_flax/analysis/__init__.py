"""Arrays, pictures and pages that show what runs have learned; and the cost of a run."""
