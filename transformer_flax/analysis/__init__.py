"""Arrays and pictures of what runs have learned and measured."""
