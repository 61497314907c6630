"""The paper's base model on WMT14 English-German (table 2; table 3, row "base").

    pip install -e ".[wmt]"
    python train.py --config=configs/base.py

The first run fetches 1.7 GB of archives and prepares them, once; from then on TensorFlow is not needed any more.
In the paper: 8 P100 for 12 hours, 27.3 BLEU on newstest2014, perplexity 4.92 and 25.8 BLEU on newstest2013.
Every field that a Transformer's run has is here, with the paper's value unless it says otherwise. Those that only
another kind of model has are in classifier.py, recurrent.py and convolutional.py, those of word vectors in vectors.py.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "base"  # names the working directory, runs/<name>, unless --workdir is given
    config.seed = 0  # of the run: initial parameters, dropout, order of the data
    config.init_from = ""  # a run (or RUN@STEP,..., or an exported folder) that parameters and tokenizer are from
    config.train_only = ""  # train only parameters whose names begin so, as in "decoder,embedding"; empty: all
    config.embedding_init = ""  # a folder of word vectors that embeddings start from (docs/vectors.md); empty: chance
    config.steps = 100_000
    config.accumulation_steps = 1  # micro-batches per update, for batches that do not fit into memory
    config.loss_chunks = 1  # makes the logits in so many parts, to save memory; the result is the same
    config.label_smoothing = 0.1
    # alpha of R-Drop, two passes that are to agree (Wu et al., 2021: 5); a step costs twice as much; 0: one pass
    config.r_drop = 0.0
    config.ema_decay = 0.0  # of a moving average of the parameters, which evaluations then use in place of `average`
    config.max_skipped = 10  # so many updates left out in a row, as loss or gradient are not finite, end the run
    # if a checkpoint, metrics or translations cannot be written: "stop" ends the run, "go on" continues it
    config.on_write_failure = "stop"
    config.deterministic = False  # on a GPU: bit-for-bit repeatable, slower; a CPU always is

    config.model = ConfigDict()
    config.model.kind = "transformer"
    config.model.num_layers = 6  # N, of the encoder and of the decoder
    config.model.d_model = 512
    config.model.d_ff = 2048
    config.model.num_heads = 8  # h
    config.model.d_k = 64
    config.model.d_v = 64
    config.model.dropout = 0.1  # on each sub-layer's output, and on embeddings plus positions
    # "sinusoidal", or "learned" (row E), or "sinusoidal_concatenated" (released code); or, inside self-attention alone,
    # "relative", learned for each distance (Shaw et al., 2018), or "rotary" (Su et al., 2021)
    config.model.positions = "sinusoidal"
    config.model.max_length = 512  # learned positions; the others have no limit
    config.model.clip_distance = 16  # of relative positions: larger distances are clipped to it
    config.model.neighbourhood = 0  # r: self-attention sees so many positions around its own (section 4); 0: all
    # Not in the paper's text, but in its released code, or in earlier or later work:
    config.model.compatibility = "scaled_dot"  # of q and k; or "dot", unscaled, or "additive" (section 3.2.1)
    config.model.attention_dropout = 0.0  # on attention weights
    config.model.ffn_dropout = 0.0  # inside the feed-forward
    config.model.pre_norm = False  # LayerNorm before each sub-layer instead of after
    config.model.tie_embeddings = True  # one matrix for source, target and output; False: three
    config.model.attention_bias = False  # biases on the attention projections
    config.model.branch_init = 1.0  # times the initial W^V, W^O, W_1 and W_2: see docs/initial_values.md
    # initial values: "xavier"; or "fairseq", W^Q, W^K and W^V times 0.71 (Ott et al., 2019); or "deepnorm", W^V, W^O,
    # W_1, W_2 and residuals times factors that follow from the depth (Wang et al., 2022); branch_init multiplies all
    config.model.start = "xavier"
    # The same model, otherwise computed:
    config.model.scan_layers = False  # one compiled layer for all N of a stack: compiles in a fraction of the time
    # or "cudnn", one kernel on a GPU: in bfloat16, with d_k = d_v, a multiple of 8 up to 256, and batches of even
    # widths, without dropout on weights, additive scores or relative positions
    config.model.attention_implementation = "plain"
    # what gradients store: "none": every activation; "products": products with weights; "layers": each layer's input;
    # the rest is computed again
    config.model.remat = "none"
    # "float32", "bfloat16" or "auto": bfloat16 on a GPU or TPU that has it, float32 elsewhere; config.json has which.
    # Parameters, softmax and loss are float32.
    config.model.dtype = "auto"  # of the computation

    config.data = ConfigDict()
    # "tfds"; or "folder": files <split>.<language>; or "tsv": <split>.tsv, with labels; or made: "numbers" in words;
    # "copy" or "reverse", lines of random letters
    config.data.source = "tfds"
    config.data.name = "wmt14_translate/de-en"  # for tfds: a translation set of TensorFlow Datasets, with its config
    config.data.path = ""  # for folder and tsv; for tfds, where sets lie: TFDS_DATA_DIR or ~/tensorflow_datasets if ""
    config.data.num_pairs = 0  # training pairs: the first so many, 0: all; of what is made: as many are made
    config.data.longest_trained = 6  # for numbers: digits, for copy and reverse: symbols, of train and valid, at most
    config.data.longest_tested = 6  # and of test; if it is more, all of test is longer than anything trained on
    config.data.label_column = 0  # for tsv: counted from 0
    config.data.text_column = 1  # for tsv
    config.data.held_out = 0.0  # for tsv: share of the training texts that are the valid split; 0: valid.tsv is
    config.data.source_language = "en"
    config.data.target_language = "de"
    # Normalised, in training as in translating; published scores of small sets are often of such text. A tokenized run
    # also translates into tokens.
    config.data.lowercase = False
    config.data.tokenized = False  # punctuation normalised and words split from it, as Moses' scripts do
    # "bpe", or "wordpiece": the longest piece first; both byte-level and lossless; or "words", not for translators
    config.data.tokenizer = "bpe"
    config.data.tokenizer_file = ""  # a tokenizer.json of Hugging Face's tokenizers to use instead; empty: train one
    # pieces shared by both languages, at most; with a tokenizer_file, as many as it has
    config.data.vocab_size = 37_000
    config.data.tokenizer_sample = 2_000_000  # pairs that the tokenizer is trained on, at most
    # probability that BPE leaves a merge out of the training text, anew each epoch (Provilkov et al., 2020: 0.1)
    config.data.bpe_dropout = 0.0
    config.data.max_length = 256  # tokens; longer pairs are left out of training
    config.data.max_length_ratio = 0.0  # of the longer side to the shorter, or the pair is left out too; 0: any
    config.data.drop_duplicates = False  # leave out pairs that stand before in the split
    config.data.tokens_per_batch = 25_000  # tokens a side with their padding, at most
    config.data.batching = "bucketed"  # like lengths together; or "packed": pairs side by side, rows of max_length
    config.data.num_buckets = 12  # batch shapes, at most, when bucketed
    # the width of every shape divides by it, when bucketed: 8 and more suit accelerators, 1 pads least
    config.data.length_multiple_of = 8
    config.data.rows_multiple_of = 8  # rows divide by it, and so among devices x accumulation steps x loss_chunks
    config.data.seed = 0  # of the data: tokenizer sample, made text, what is held out, order of shapes, BPE-dropout
    config.data.cache_dir = ""  # tokenised text, and large text until it is; empty: the user's cache directory

    config.optimizer = ConfigDict()
    # or "muon", which makes the update of each matrix orthogonal (Jordan et al., 2024) and leaves the rest to Adam; or
    # "schedule_free", Adam at a rate that stays at its peak, evaluated with an average (Defazio et al., 2024)
    config.optimizer.name = "adam"
    config.optimizer.factor = 1.0  # times the paper's learning rate
    config.optimizer.warmup_steps = 4000
    config.optimizer.b1 = 0.9  # the momentum, for Muon 0.95; with Schedule-Free the share of the average in gradients
    config.optimizer.b2 = 0.98
    config.optimizer.eps = 1e-9
    config.optimizer.clip_norm = 0.0  # of the whole gradient; 0: off

    config.parallel = ConfigDict()
    config.parallel.mode = "jit"  # over a mesh of devices, or "pmap"
    config.parallel.num_devices = 0  # 0: all there are
    config.parallel.cpu_devices = 1  # that a CPU counts as; several compute side by side
    config.parallel.shard_params = False  # a share of parameters, moments and moving average on each; "jit" only

    config.decode = ConfigDict()
    config.decode.beam_size = 4
    config.decode.length_penalty = "gnmt"  # ((5 + |Y|) / 6)^alpha, or "length": |Y|^alpha, or "none"
    config.decode.alpha = 0.6
    config.decode.min_length = 2  # shortest output in tokens, the end symbol included; 1 also allows no token before it
    config.decode.max_extra_length = 50  # output tokens beyond the input's
    config.decode.max_input_length = 256  # tokens; longer inputs, and pairs whose loss is measured, are cut and counted
    config.decode.batch_size = 64  # sentences at a time, on each device; fewer where they are longer than 64 tokens
    config.decode.window = 2048  # lines that are sorted by length, to be translated with those of like length

    config.eval = ConfigDict()
    config.eval.every = 5_000  # steps; 0: at the end only
    config.eval.patience = 0  # evaluations without a better validation loss after which a run ends; 0: never
    config.eval.sentences = 0  # of the validation split that are translated during training; 0: all
    config.eval.final_sentences = 0  # of each split that are translated at the end; 0: all
    config.eval.average = 1  # checkpoints averaged for evaluations during training: the newest, at the interval
    config.eval.final_average = 5  # and at the end; table 3 uses none (1), big 20
    config.eval.test = True  # score the test split at the end

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 1_500  # steps: 10 minutes of the paper's base model
    config.checkpoint.keep = 5  # the latest at that interval; the best evaluated one stays too

    config.log = ConfigDict()
    config.log.every = 100  # steps
    config.log.wandb = ""  # a project of Weights & Biases that metrics are sent to, too; empty: none
    return config
