"""What runs have learned, as arrays, pictures and pages; and what a run costs."""
