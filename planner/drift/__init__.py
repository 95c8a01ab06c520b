"""The command `penstock drift`: does recorded traffic still match a section `sized_for`?"""
