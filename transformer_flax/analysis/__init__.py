"""Pictures of what runs have learned and measured."""
