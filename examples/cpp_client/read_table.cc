// Reads a TransferQueue from C++ with nothing but Arrow Flight: lists the tables, prints what the columns of one mean,
// and reads some of its rows, only the columns asked for. Nothing is consumed.
//
//   read_table grpc://127.0.0.1:8815                          the tables
//   read_table grpc://127.0.0.1:8815 rollouts                 its columns, and all rows
//   read_table grpc://127.0.0.1:8815 rollouts text,reward 10  ten rows of two columns
//
// Ends with 0 if all went well, 1 if the server refused (its error code and message are on stderr), 2 on wrong usage.

#include <arrow/api.h>
#include <arrow/flight/api.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace flight = arrow::flight;

constexpr double kDeadlineSeconds = 30.0;  // of one call, all of its stream included

/// Returns text as a JSON string: the ticket of a read is a small JSON message.
std::string Quote(const std::string& text) {
  std::string quoted = "\"";
  for (const unsigned char c : text) {
    char escape[8];
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += static_cast<char>(c);
    } else if (c < 0x20) {
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      quoted += escape;
    } else {
      quoted += static_cast<char>(c);
    }
  }
  return quoted + '"';
}

/// Returns the ticket that reads at most `max_rows` rows of `columns`, the oldest first; no columns means all.
std::string ReadTicket(const std::string& table, const std::vector<std::string>& columns, int64_t max_rows) {
  std::string ticket = R"({"v": 1, "verb": "read", "identity": "cpp", "table": )" + Quote(table);
  if (!columns.empty()) {
    std::string names;
    for (const std::string& name : columns) names += (names.empty() ? "" : ", ") + Quote(name);
    ticket += R"(, "columns": [)" + names + "]";
  }
  if (max_rows >= 0) ticket += R"(, "max_rows": )" + std::to_string(max_rows);
  return ticket + "}";
}

/// Returns one note of a column ("meaning", "unit", "shape", "writer", "nullable"), or an empty string.
std::string Note(const arrow::Field& field, const std::string& key) {
  if (!field.HasMetadata()) return "";
  return field.metadata()->Get(key).ValueOr("");
}

arrow::Status PrintTables(flight::FlightClient* client, const flight::FlightCallOptions& options) {
  ARROW_ASSIGN_OR_RAISE(auto listing, client->ListFlights(options, flight::Criteria{}));
  while (true) {
    ARROW_ASSIGN_OR_RAISE(auto info, listing->Next());
    if (info == nullptr) return arrow::Status::OK();
    std::cout << "table " << info->descriptor().path.at(0) << ": " << info->total_records() << " rows, "
              << info->total_bytes() << " bytes\n";
  }
}

arrow::Status PrintColumns(flight::FlightClient* client, const flight::FlightCallOptions& options,
                           const std::string& table) {
  const auto descriptor = flight::FlightDescriptor::Path({table});
  ARROW_ASSIGN_OR_RAISE(auto info, client->GetFlightInfo(options, descriptor));
  arrow::ipc::DictionaryMemo memo;
  ARROW_ASSIGN_OR_RAISE(auto schema, info->GetSchema(&memo));
  for (const auto& field : schema->fields()) {
    std::cout << "column " << field->name() << " " << field->type()->ToString();
    const std::string shape = Note(*field, "shape");
    const std::string unit = Note(*field, "unit");
    if (!shape.empty()) std::cout << " " << shape;
    if (!unit.empty()) std::cout << " in " << unit;
    std::cout << ": " << Note(*field, "meaning") << "\n";
  }
  return arrow::Status::OK();
}

arrow::Status PrintRows(flight::FlightClient* client, const flight::FlightCallOptions& options,
                        const std::string& ticket) {
  ARROW_ASSIGN_OR_RAISE(auto reader, client->DoGet(options, flight::Ticket{ticket}));
  ARROW_ASSIGN_OR_RAISE(auto schema, reader->GetSchema());
  int64_t num_rows = 0;
  while (true) {
    ARROW_ASSIGN_OR_RAISE(auto chunk, reader->Next());
    if (chunk.data == nullptr) break;
    for (int64_t row = 0; row < chunk.data->num_rows(); ++row, ++num_rows) {
      std::cout << "row";
      for (int index = 0; index < chunk.data->num_columns(); ++index) {
        ARROW_ASSIGN_OR_RAISE(auto value, chunk.data->column(index)->GetScalar(row));
        std::cout << " " << schema->field(index)->name() << "=" << value->ToString();
      }
      std::cout << "\n";
    }
  }
  std::cout << num_rows << " rows\n";
  return arrow::Status::OK();
}

arrow::Status Run(const std::string& uri, const std::string& table, const std::vector<std::string>& columns,
                  int64_t max_rows) {
  ARROW_ASSIGN_OR_RAISE(auto location, flight::Location::Parse(uri));
  ARROW_ASSIGN_OR_RAISE(auto client, flight::FlightClient::Connect(location));
  flight::FlightCallOptions options;
  options.timeout = flight::TimeoutDuration{kDeadlineSeconds};
  if (table.empty()) return PrintTables(client.get(), options);
  ARROW_RETURN_NOT_OK(PrintColumns(client.get(), options, table));
  return PrintRows(client.get(), options, ReadTicket(table, columns, max_rows));
}

int main(int argc, char** argv) {
  if (argc < 2 || argc > 5) {
    std::cerr << "usage: read_table URI [TABLE [COLUMN,COLUMN... [MAX_ROWS]]]\n";
    return 2;
  }
  std::vector<std::string> columns;
  std::istringstream names(argc > 3 ? argv[3] : "");
  for (std::string name; std::getline(names, name, ',');) columns.push_back(name);
  const int64_t max_rows = argc > 4 ? std::strtoll(argv[4], nullptr, 10) : -1;
  const arrow::Status status = Run(argv[1], argc > 2 ? argv[2] : "", columns, max_rows);
  if (status.ok()) return 0;
  const auto detail = flight::FlightStatusDetail::UnwrapStatus(status);
  std::cerr << "error: " << (detail && !detail->extra_info().empty() ? detail->extra_info() : status.ToString())
            << "\n";
  return 1;
}
