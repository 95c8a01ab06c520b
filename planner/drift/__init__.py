"""The command `penstock drift`: do recorded requests have the shapes that a fleet was sized for?"""
