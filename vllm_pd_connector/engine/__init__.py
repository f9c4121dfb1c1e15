"""Inside vLLM: the only room that imports it. The connector, its scheduler half and its worker half."""
