NAME = "exports.json"


def exports_of(run):
    return []


def with_exports(card, records):
    return card
