"""Values of the rows: checked on the way in, kept in memory or spilled, gathered and filtered on the way out."""
