"""Files around the queue: rows from and to Parquet, Arrow and JSONL, and tables declared in YAML."""
