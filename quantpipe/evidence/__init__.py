"""What a run found, gathered for its report: results of items, folders and engines as plain rows."""
