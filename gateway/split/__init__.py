"""One request between two endpoints: the decision carried out, two legs, what is said on them and how it all ends.

Not here: whether to split and between whom (policies.split), and what each engine wants to hear (kvtransfer.dialects).
"""
