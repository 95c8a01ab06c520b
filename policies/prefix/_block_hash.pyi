from policies.prefix.sampled_keys import Keys

def chain_words(
    data: bytes | memoryview,
    word_keys: Keys,
    position_keys: Keys,
    fold: int,
    mix: int,
    key: int,
    keys: Keys,
    /,
) -> None: ...
