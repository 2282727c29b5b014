"""Time, memory and cost of any plan on any cluster, and the best plan. Imports no torch."""
