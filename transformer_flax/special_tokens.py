"""The ids with a meaning of their own, shared by all rooms: text is numbered from 3 up."""

PAD_ID = 0  # fills rows up to a batch's shape; weighs nothing, is never attended
BEGIN_ID = 1  # the decoder's first input
END_ID = 2  # closes every sentence, source and target
NUM_SPECIAL = 3
