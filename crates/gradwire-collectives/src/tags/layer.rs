//! Class by layer (MLT section 4.2.2, DLCP section 3.2.2): the front layers are needed first by the next forward pass.

/// Class of layer `layer` of `layers` when a switch has `classes` queues: `floor(layer * classes / layers)`. Layer 0 is the
/// first of the forward pass and the most urgent; layers past the end are as the last.
// claim: mlt/layer-priority
#[must_use]
pub fn layer_class(layer: u32, layers: u32, classes: u8) -> u8 {
    let last = u64::from(layers.max(1)) - 1;
    let class = u64::from(layer).min(last) * u64::from(classes) / (last + 1);
    // Below `classes`, since the layer is below the number of layers.
    class as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    // test of: mlt/layer-priority
    #[test]
    fn layers_are_spread_evenly_over_the_classes_in_order() {
        for layers in 1..100 {
            for classes in 1..=8_u8 {
                let of_layers: Vec<u8> =
                    (0..layers).map(|layer| layer_class(layer, layers, classes)).collect();
                for (layer, class) in of_layers.iter().enumerate() {
                    let exact = layer as f64 * f64::from(classes) / f64::from(layers);
                    assert_eq!(f64::from(*class), exact.floor(), "layer {layer} of {layers} in {classes}");
                }
                assert!(of_layers[0] == 0 && of_layers.windows(2).all(|pair| pair[0] <= pair[1]));
                let sizes = (0..classes).map(|class| of_layers.iter().filter(|c| **c == class).count());
                let (least, most) = sizes.fold((usize::MAX, 0), |(a, b), n| (a.min(n), b.max(n)));
                assert!(most - least <= 1, "{layers} layers in {classes} classes: {of_layers:?}");
            }
        }
    }

    #[test]
    fn no_layer_is_beyond_the_last_class() {
        assert_eq!(layer_class(7, 3, 8), layer_class(2, 3, 8));
        assert_eq!(layer_class(u32::MAX, u32::MAX, 8), 7);
        assert_eq!(layer_class(5, 0, 4), 0);
    }
}
