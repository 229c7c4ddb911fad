"""Plans as text and as plain values."""
def to_text(plan): return "plan"
def to_json(plan): return {}
