"""The command line: three verbs over the api. The only place that prints."""
