//! `include/gradwire.h` and the functions and structures behind it are the same: names, order, types.

use std::collections::BTreeMap;

const HEADER: &str = include_str!("../include/gradwire.h");
const SOURCES: [&str; 4] = [
    include_str!("../src/lib.rs"),
    include_str!("../src/config.rs"),
    include_str!("../src/datagram.rs"),
    include_str!("../src/rank.rs"),
];

/// Text without comments, attributes and line ends.
fn plain(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with(['/', '*', '#']));
    lines.collect::<Vec<_>>().join(" ")
}

/// What a type of Rust is in C.
fn c_type(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(inner) = rust.strip_prefix("*const ") {
        return format!("const {}*", c_type(inner));
    }
    if let Some(inner) = rust.strip_prefix("*mut ") {
        return format!("{}*", c_type(inner));
    }
    if let Some(inner) = rust.strip_prefix("Option<").and_then(|rest| rest.strip_suffix('>')) {
        let (_, signature) = inner.split_once("fn(").expect("a function");
        let (arguments, result) = signature.split_once(')').expect("its arguments");
        let arguments: Vec<_> = arguments.split(',').map(c_type).collect();
        return format!("fn({}){}", arguments.join(","), result_of(result));
    }
    let names = [
        ("u8", "uint8_t"),
        ("u32", "uint32_t"),
        ("u64", "uint64_t"),
        ("i32", "int32_t"),
        ("usize", "size_t"),
        ("f32", "float"),
        ("c_char", "char"),
        ("c_void", "void"),
    ];
    let known = names.iter().find(|(name, _)| *name == rust);
    known.map_or(rust, |(_, name)| name).to_owned()
}

fn result_of(arrow: &str) -> String {
    arrow.trim().strip_prefix("->").map_or("void".to_owned(), c_type)
}

/// `name type` pairs of Rust, in C's types.
fn fields(list: &str, separator: char) -> Vec<String> {
    // A comma within a function type separates nothing.
    let mut depth = 0;
    let mut parts = vec![String::new()];
    for letter in list.chars() {
        depth += i32::from(letter == '(') - i32::from(letter == ')');
        match (letter == separator && depth == 0, parts.last_mut()) {
            (true, _) => parts.push(String::new()),
            (false, Some(part)) => part.push(letter),
            _ => {}
        }
    }
    let pairs = parts.iter().filter_map(|part| part.trim().split_once(':'));
    pairs.map(|(name, kind)| format!("{} {}", c_type(kind), name.replace("pub ", "").trim())).collect()
}

fn of_sources() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for text in SOURCES.map(plain) {
        for rest in text.split("extern \"C\" fn gradwire_").skip(1) {
            let (name, rest) = rest.split_once('(').expect("arguments");
            let (arguments, rest) = rest.split_once(')').expect("their end");
            let result = result_of(rest.split_once('{').expect("a body").0);
            found.insert(
                format!("gradwire_{name}"),
                format!("{result}({})", fields(arguments, ',').join(";")),
            );
        }
        for rest in text.split("pub struct ").skip(1) {
            let (name, body) = rest.split_once(" {").expect("a structure");
            let body = body.split_once('}').expect("its end").0;
            if body.contains("pub ") {
                found.insert(name.to_owned(), fields(body, ',').join(";"));
            }
        }
    }
    found
}

/// A declaration of C as `type name`: `uint32_t rank`, `int32_t (*has_room)(void *)`.
fn c_field(text: &str) -> String {
    let text = text.trim();
    if let Some((result, rest)) = text.split_once("(*") {
        let (name, rest) = rest.split_once(")(").expect("arguments");
        let arguments: Vec<_> =
            rest.trim_end_matches(')').split(',').map(|kind| kind.replace(" *", "*")).collect();
        let arguments: Vec<_> = arguments.iter().map(|kind| kind.trim()).collect();
        return format!("fn({}){} {name}", arguments.join(","), result.trim());
    }
    let (kind, name) = text.rsplit_once(' ').expect("a type and a name");
    let pointer = if name.starts_with('*') { "*" } else { "" };
    format!("{}{pointer} {}", kind.trim(), name.trim_start_matches('*'))
}

fn of_header() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let text = plain(HEADER);
    let (structures, functions) = text.split_at(text.find("int32_t gradwire_").expect("functions"));
    for rest in structures.split("typedef struct ").skip(1).filter(|rest| rest.contains(" {")) {
        let (name, body) = rest.split_once(" {").expect("a structure");
        let body = body.split_once('}').expect("its end").0;
        let fields: Vec<_> = body.split(';').filter(|field| !field.trim().is_empty()).map(c_field).collect();
        found.insert(name.to_owned(), fields.join(";"));
    }
    for declaration in functions.split(';').filter(|text| text.contains("gradwire_")) {
        let (front, arguments) = declaration.split_once('(').expect("arguments");
        let front = c_field(front);
        let (result, name) = front.split_once(' ').expect("a result and a name");
        let arguments = arguments.trim_end_matches([')', ' ']).split(',').filter(|kind| *kind != "void");
        let arguments: Vec<_> = arguments.map(c_field).collect();
        found.insert(name.to_owned(), format!("{result}({})", arguments.join(";")));
    }
    found
}

#[test]
fn the_header_says_what_the_sources_say() {
    let sources = of_sources();
    assert_eq!(sources, of_header());
    assert_eq!(sources.len(), 11 + 4, "every function and structure was found");
}

#[test]
fn the_headers_numbers_are_the_sources() {
    for (name, value) in [
        ("GRADWIRE_OK", gradwire::GRADWIRE_OK),
        ("GRADWIRE_NONE", gradwire::GRADWIRE_NONE),
        ("GRADWIRE_NULL", gradwire::GRADWIRE_NULL),
        ("GRADWIRE_INVALID", gradwire::GRADWIRE_INVALID),
    ] {
        assert!(HEADER.contains(&format!("#define {name} {value}\n")), "{name} is {value}");
    }
    for (name, value) in [
        ("GRADWIRE_CONNECTED", gradwire::GRADWIRE_CONNECTED),
        ("GRADWIRE_DONE", gradwire::GRADWIRE_DONE),
        ("GRADWIRE_FAILED", gradwire::GRADWIRE_FAILED),
        ("GRADWIRE_GROUP_FAILED", gradwire::GRADWIRE_GROUP_FAILED),
        ("GRADWIRE_SERVED", gradwire::GRADWIRE_SERVED),
        ("GRADWIRE_INTERFACE", gradwire::gradwire_interface()),
    ] {
        assert!(HEADER.contains(&format!("#define {name} {value}\n")), "{name} is {value}");
    }
}
