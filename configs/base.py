"""The paper's base model on WMT14 English-German (table 2; table 3, row "base").

    pip install -e ".[wmt]"
    python train.py --config=configs/base.py

The first run downloads 1.7 GB of archives and prepares them. After that, TensorFlow is not needed any more.
In the paper: 8 P100 for 12 hours, 27.3 BLEU on newstest2014, perplexity 4.92 and 25.8 BLEU on newstest2013.
This file has every field of a Transformer's run, with the paper's value unless the comment says otherwise. Fields of
other kinds of models are in classifier.py, recurrent.py and convolutional.py. Fields of word vectors are in vectors.py.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "base"  # names the working directory, runs/<name>, unless --workdir is given
    config.seed = 0  # the run's seed: initial parameters, dropout, order of the data
    config.init_from = ""  # take parameters and tokenizer from this run (or RUN@STEP,..., or an exported folder)
    config.train_only = ""  # train only parameters whose names begin like this: "decoder,embedding"; empty: train all
    config.embedding_init = ""  # start embeddings from this folder of word vectors (docs/vectors.md); empty: at random
    config.steps = 100_000
    config.accumulation_steps = 1  # micro-batches that a batch is divided into, if it does not fit into memory
    config.loss_chunks = 1  # compute the logits in this many parts, to save memory; the result is the same
    config.label_smoothing = 0.1
    # alpha of R-Drop: two passes, trained to agree (Liang et al., 2021: 5), so a step costs twice as much; 0: one pass
    config.r_drop = 0.0
    # Decay of a moving average of the parameters, which evaluations use instead of averaged checkpoints; 0: none.
    config.ema_decay = 0.0
    # An update is skipped if the loss or the gradient is not finite. This many skipped updates in a row end the run.
    config.max_skipped = 10
    # If a checkpoint, metrics or translations cannot be written: "stop" ends the run, "go on" continues the run.
    config.on_write_failure = "stop"
    # True asks XLA for slower kernels, which repeat a run bit for bit on a GPU (not tried), if the process has not used
    # the GPU yet. A CPU always repeats runs.
    config.deterministic = False

    config.model = ConfigDict()
    config.model.kind = "transformer"
    config.model.num_layers = 6  # N, of the encoder and of the decoder
    config.model.d_model = 512
    config.model.d_ff = 2048
    config.model.num_heads = 8  # h; d_k and d_v do not follow it
    config.model.d_k = 64
    config.model.d_v = 64
    config.model.dropout = 0.1  # on each sub-layer's output, and on embeddings plus positions (section 5.4)
    # Added to the embeddings: "sinusoidal", "learned" (row E) or "sinusoidal_concatenated" (released code). Inside
    # self-attention only: "relative", learned for each distance (Shaw et al., 2018), or "rotary" (Su et al., 2021; d_k
    # must be even, and scores not additive).
    config.model.positions = "sinusoidal"
    config.model.max_length = 512  # number of learned positions; other positions have no limit
    config.model.clip_distance = 16  # of relative positions: larger distances are clipped to this one
    config.model.neighbourhood = 0  # r: self-attention sees r // 2 positions on either side (section 4); 0: all
    # Compatibility function of q and k (section 3.2.1): "scaled_dot"; "dot", unscaled; or "additive".
    config.model.compatibility = "scaled_dot"
    # The next fields allow what is not in the paper's text, but in its released code, or in earlier or later work:
    config.model.attention_dropout = 0.0  # on attention weights
    config.model.ffn_dropout = 0.0  # inside the feed-forward
    config.model.pre_norm = False  # LayerNorm before each sub-layer instead of after
    config.model.tie_embeddings = True  # one matrix for source, target and output; False: three
    config.model.attention_bias = False  # biases on the attention projections
    config.model.branch_init = 1.0  # multiplies the initial W^V, W^O, W_1 and W_2; see docs/initial_values.md
    # Initial values. "xavier"; "fairseq": W^Q, W^K and W^V times 0.71 (Ott et al., 2019). The others are for many
    # layers, and change more than initial values: "deepnorm" multiplies residuals by a constant (Wang et al., 2022),
    # "admin" by a parameter (Liu et al., 2020), and "t_fixup" has no LayerNorm (Huang et al., 2020). These three
    # need pre_norm = False. branch_init applies to each of them.
    config.model.start = "xavier"
    # The next fields change how the model is computed, not the model:
    config.model.scan_layers = False  # compile one layer for all N in training, in a fraction of the time
    # "plain"; or "cudnn": one kernel on a GPU. It needs bfloat16, d_k = d_v, a multiple of 8 up to 256, and batches of
    # even widths. It cannot have dropout on weights, additive scores, relative positions or several seeds in one
    # program. A neighbourhood must be at least 4 and have an even half.
    config.model.attention_implementation = "plain"
    # What is stored for the gradient: "none": every activation; "products": products with weights; "layers": each
    # layer's input. Everything else is recomputed. On a CPU, this saves much memory with scan_layers only.
    config.model.remat = "none"
    # Type of the computation: "float32", "bfloat16" or "auto". "auto" is bfloat16 on a GPU or TPU that has it, float32
    # elsewhere; config.json records the choice. Parameters, softmax and loss are float32. On a CPU, trained
    # models are used in float32.
    config.model.dtype = "auto"

    config.data = ConfigDict()
    # "tfds": TensorFlow Datasets; "folder": files <split>.<language>; "tsv": files <split>.tsv, with labels.
    # Made text: "numbers" in words; "copy" or "reverse": lines of random letters.
    config.data.source = "tfds"
    config.data.name = "wmt14_translate/de-en"  # for tfds: the name of a translation set, with its config
    # For folder and tsv: the folder. For tfds: where sets lie; "" is TFDS_DATA_DIR or ~/tensorflow_datasets.
    config.data.path = ""
    # Number of training pairs to use, the first of the split; 0: all. For made text: number of training pairs to make;
    # the first 1,000 numbers are 0 to 999.
    config.data.num_pairs = 0
    config.data.longest_trained = 6  # maximum digits (numbers) or symbols (copy, reverse) in train and valid
    config.data.longest_tested = 6  # the same for test; if larger, all of test is longer than anything trained on
    config.data.label_column = 0  # for tsv: the label's column, counted from 0
    config.data.text_column = 1  # for tsv: the text's column
    config.data.held_out = 0.0  # for folder and tsv: share of train that becomes the valid split; 0: read its files
    config.data.source_language = "en"
    config.data.target_language = "de"
    # The next two fields normalise the text, in training and in translation. Published scores of small sets are often
    # measured on such text. A tokenized run also translates into tokens.
    config.data.lowercase = False
    config.data.tokenized = False  # normalise punctuation and split it from words, as Moses' scripts do
    # "bpe"; "wordpiece": the longest piece first; both are byte-level and lossless. Or "words", not for translators.
    config.data.tokenizer = "bpe"
    config.data.tokenizer_file = ""  # use this tokenizer.json of Hugging Face's tokenizers; empty: train a tokenizer
    # Maximum number of pieces, shared by both languages. With a tokenizer_file, exactly the file's number of pieces;
    # the fields tokenizer and tokenizer_sample then have no effect.
    config.data.vocab_size = 37_000
    # Maximum number of pairs that the tokenizer is trained on. Text without blanks takes memory: 300 bytes a character.
    config.data.tokenizer_sample = 2_000_000
    # Probability that BPE leaves out a merge in the training text, anew each epoch (Provilkov et al., 2020: 0.1).
    config.data.bpe_dropout = 0.0
    config.data.max_length = 256  # tokens, end symbol included; training leaves out longer pairs
    config.data.max_length_ratio = 0.0  # maximum ratio of longer to shorter side, in such tokens; 0: any ratio
    config.data.drop_duplicates = False  # leave out pairs that occur earlier in the split, as tokens
    config.data.tokens_per_batch = 25_000  # maximum tokens on each side of a batch, padding included
    config.data.batching = "bucketed"  # pairs of similar length in a batch; or "packed": pairs share rows of max_length
    config.data.num_buckets = 12  # maximum number of batch shapes, when bucketed
    # When bucketed, the width of every shape is a multiple of this. 8 and more suit accelerators, 1 pads least.
    config.data.length_multiple_of = 8
    # Rows of a batch are a multiple of this. It must be a multiple of devices x accumulation_steps x loss_chunks.
    config.data.rows_multiple_of = 8
    config.data.seed = 0  # the data's seed: tokenizer sample, made text, held-out texts, order of shapes, BPE-dropout
    config.data.cache_dir = ""  # for tokenised text, and large text until it is tokenised; empty: the user's cache

    config.optimizer = ConfigDict()
    # "adam"; "muon": makes the update of each matrix orthogonal (Jordan et al., 2024), and leaves the rest to Adam;
    # "schedule_free": Adam with a rate that stays at its peak, evaluated with an average (Defazio et al., 2024).
    config.optimizer.name = "adam"
    # Multiplies the paper's learning rate (section 5.3), which then peaks at factor / sqrt(d_model * warmup_steps).
    config.optimizer.factor = 1.0
    config.optimizer.warmup_steps = 4000
    # Momentum; for Muon, set 0.95. Schedule-Free takes gradients at (1 - b1) parameters + b1 average.
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.98
    config.optimizer.eps = 1e-9
    config.optimizer.cooldown = 0.0  # share of the steps, at the end, in which the rate falls linearly to 0
    config.optimizer.clip_norm = 0.0  # largest norm of the whole gradient; 0: no clipping

    config.parallel = ConfigDict()
    config.parallel.mode = "jit"  # "jit" over a mesh of devices, or "pmap"
    config.parallel.num_devices = 0  # 0: all devices
    config.parallel.cpu_devices = 1  # devices that a CPU is divided into; several compute side by side
    # True: each device stores a share of parameters, moments and moving average; for mode "jit" only.
    config.parallel.shard_params = False

    config.decode = ConfigDict()
    config.decode.beam_size = 4
    config.decode.length_penalty = "gnmt"  # ((5 + |Y|) / 6)^alpha, or "length": |Y|^alpha, or "none"
    config.decode.alpha = 0.6
    # Minimum length in tokens, the end symbol included. 1 allows empty outputs; the paper names no minimum.
    config.decode.min_length = 2
    config.decode.max_extra_length = 50  # an output may have this many tokens more than the input
    # Tokens, end symbol included. Longer inputs are cut and counted, and so are longer pairs whose loss is measured.
    config.decode.max_input_length = 256
    # Sentences at a time, on each device; fewer if they are longer than 64 tokens, or 16 where outputs are given.
    config.decode.batch_size = 64
    config.decode.window = 2048  # lines that are sorted by length, so that similar lengths are translated together

    config.eval = ConfigDict()
    config.eval.every = 5_000  # steps between evaluations; 0: evaluate at the end only
    config.eval.patience = 0  # a run ends after this many evaluations without a better validation loss; 0: never
    config.eval.sentences = 0  # sentences of the validation split to translate during training; 0: all
    config.eval.final_sentences = 0  # sentences of each split to translate at the end; 0: all
    config.eval.average = 1  # newest checkpoints to average in evaluations during training, checkpoint.every apart
    config.eval.final_average = 5  # the same at the end; table 3 uses 1 (no average), big 20
    config.eval.test = True  # score the test split at the end

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 1_500  # steps: 10 minutes of the paper's base model
    # Latest checkpoints to keep at that interval. The latest two after them stay too, and the one with the best
    # validation score, if evaluations do not average several.
    config.checkpoint.keep = 5

    config.log = ConfigDict()
    config.log.every = 100  # steps between log lines; with eval.patience, evaluated steps are logged too
    config.log.wandb = ""  # also send the metrics to this project of Weights & Biases; empty: do not
    return config
