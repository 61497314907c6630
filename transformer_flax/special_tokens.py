"""The ids of the special tokens. All other tokens have ids from 3 on."""

PAD_ID = 0  # fills rows up to a batch's shape; has no weight in losses, and no token attends to it
BEGIN_ID = 1  # the decoder's first input
END_ID = 2  # closes every sentence, source and target
NUM_SPECIAL = 3
