from transformer_flax.training.peak_flops import data_sheet_flops, large_product, measured_flops


def test_the_data_sheets_know_a_device_by_the_beginning_of_its_name():
    assert data_sheet_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert data_sheet_flops("TPU v5 lite", "float32") == 197e12
    assert data_sheet_flops("TPU v5p", "bfloat16") == 459e12
    assert data_sheet_flops("cpu", "float32") is None


def test_the_peak_is_a_rate_that_this_machine_can_have():
    product, flops = large_product("float32", repeats=2)
    assert product().shape == (2048, 2048)
    assert flops == 2 * 2 * 2048**3
    assert 1e9 < measured_flops("float32") < 1e15
