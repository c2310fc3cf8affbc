"""DeepSpeed's engines: one for each method, and what they share."""
