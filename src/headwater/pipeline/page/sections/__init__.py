"""The report's sections, one per gold table; each takes the report and gives its panel."""
