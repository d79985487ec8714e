"""Every option, declared once: groups of fields that verbs, run settings and Python configs are composed of."""
